"""Resources server `my_environment`: the policy asks a warehouse how many items it has, and answers with one number."""

import re
from typing import ClassVar

from fastapi import FastAPI
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from pydantic import BaseModel

STOCK = {"apples": 12, "bananas": 7, "cherries": 250, "lemons": 0, "pears": 30}


class MyEnvironmentConfig(BaseResourcesServerConfig):
    pass  # fields of your own are set in configs/my_environment.yaml


class CountItemsRequest(BaseModel):
    item: str


class CountItemsResponse(BaseModel):
    count: int | None  # None: the warehouse does not know the item


class MyEnvironmentVerifyRequest(BaseVerifyRequest):
    expected_answer: int  # a field of the row


class MyEnvironmentVerifyResponse(BaseVerifyResponse):
    expected_answer: int
    extracted_answer: str | None  # maj@k counts equal answers by this field
    tool_calls: int  # a number here becomes a metric


class MyEnvironment(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: MyEnvironmentConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/count_items")(self.count_items)  # a tool is a route of its name
        return app

    async def count_items(self, body: CountItemsRequest) -> CountItemsResponse:
        return CountItemsResponse(count=STOCK.get(body.item.strip().lower()))

    async def verify(self, body: MyEnvironmentVerifyRequest) -> MyEnvironmentVerifyResponse:
        output = body.response.output
        messages = [item for item in output if item.type == "message"]
        last = messages[-1].content if messages else []
        text = "".join(part.text for part in last if part.type == "output_text")
        last_line = text.strip().rpartition("\n")[2]
        answer = last_line if re.fullmatch(r"-?\d+(\.\d+)?", last_line) else None
        return MyEnvironmentVerifyResponse(
            **body.model_dump(),
            reward=float(answer is not None and float(answer) == body.expected_answer),
            extracted_answer=answer,
            tool_calls=sum(item.type == "function_call" for item in output),
        )


if __name__ == "__main__":
    MyEnvironment.run_webserver()
