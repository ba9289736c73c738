"""A resources server of one's own: an answer is worth the share of its characters that are the wanted letter."""

from typing import ClassVar

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class LetterShareConfig(BaseResourcesServerConfig):
    pass


class LetterShareVerifyRequest(BaseVerifyRequest):
    letter: str  # a field of the row


class LetterShareVerifyResponse(BaseVerifyResponse):
    letter: str
    answer_length: int  # a number here becomes a metric
    reward_components: dict[str, float]


class LetterShare(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: LetterShareConfig

    async def verify(self, body: LetterShareVerifyRequest) -> LetterShareVerifyResponse:
        messages = [item for item in body.response.output if item.type == "message"]
        text = "".join(
            part.text for message in messages for part in message.content if part.type == "output_text"
        )
        share = text.count(body.letter) / len(text) if text else 0.0
        # Trainers may weigh this part: whether the answer starts with the letter. An empty answer has no such part.
        parts = {"start": float(text.startswith(body.letter))} if text else {}
        return LetterShareVerifyResponse(
            **body.model_dump(), reward=share, answer_length=len(text), reward_components=parts
        )


if __name__ == "__main__":
    LetterShare.run_webserver()
