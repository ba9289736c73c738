"""Repositories with failing tests: each rollout gets one in a sandbox of its own and is scored by running the tests there."""

import base64
import shlex
from typing import ClassVar

from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from nemo_gym.sandbox.config import resolve_provider_config, resolve_provider_metadata
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, ConfigDict, Field

REPOSITORY = "/repo"
"""Where the repository is in a container. The provider `local` gives each rollout a directory instead."""


class FixRepoConfig(BaseResourcesServerConfig):
    model_config = ConfigDict(extra="allow")
    sandbox_provider: str
    sandbox_spec: dict = Field(default_factory=dict)
    test_timeout_s: float = 120.0


class Task(BaseModel):
    files: dict[str, str]
    """Path in the repository -> content."""
    hidden_files: dict[str, str] = Field(default_factory=dict)
    """Written just before the tests run, so that a policy cannot change them."""
    test_command: str
    image: str | None = None


class SeedRequest(BaseSeedSessionRequest, Task):
    model_config = ConfigDict(extra="allow")


class SeedResponse(BaseSeedSessionResponse):
    sandbox_handle: str
    """By which agents that work inside the sandbox find it."""


class BashRequest(BaseModel):
    command: str


class BashResponse(BaseModel):
    output: str
    return_code: int


class VerifyRequest(BaseVerifyRequest, Task):
    model_config = ConfigDict(extra="allow")


class VerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")
    test_output: str = ""


class FixRepo(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: FixRepoConfig

    def model_post_init(self, context):
        super().model_post_init(context)
        self._sandboxes: dict[str, AsyncSandbox] = {}

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/bash")(self.bash)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> SeedResponse:
        named, config = self.config.sandbox_provider, get_global_config_dict()
        provider = resolve_provider_config(named, config)
        settings = {
            "workdir": None if "local" in provider else REPOSITORY,
            **self.config.sandbox_spec,
            "metadata": resolve_provider_metadata(named, config),
        }
        settings["image"] = body.image or settings.get("image")
        sandbox = AsyncSandbox(provider)
        await sandbox.start(SandboxSpec(**settings))
        self._sandboxes[request.session[SESSION_ID_KEY]] = sandbox
        try:
            await _write(sandbox, body.files)
        except BaseException:
            await self._stop(request)
            raise
        return SeedResponse(sandbox_handle=sandbox._handle.sandbox_id)

    async def bash(self, request: Request, body: BashRequest) -> BashResponse:
        """A tool for agents that work outside the sandbox."""
        done = await self._sandboxes[request.session[SESSION_ID_KEY]].exec(body.command)
        return BashResponse(output=f"{done.stdout or ''}{done.stderr or ''}", return_code=done.return_code)

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        sandbox = self._sandboxes[request.session[SESSION_ID_KEY]]
        try:
            await _write(sandbox, body.hidden_files)
            done = await sandbox.exec(body.test_command, timeout_s=self.config.test_timeout_s)
        except RuntimeError as error:
            return VerifyResponse(
                **body.model_dump(),
                reward=0.0,
                mask_sample=True,
                failure_kind="sandbox_error",
                failure_reason=str(error),
            )
        finally:
            await self._stop(request)
        output = f"{done.stdout or ''}{done.stderr or ''}"
        if done.error_type == "sandbox":  # the container is gone: no test has failed
            return VerifyResponse(
                **body.model_dump(),
                reward=0.0,
                mask_sample=True,
                failure_kind="sandbox_error",
                failure_reason=output,
            )
        return VerifyResponse(**body.model_dump(), reward=float(done.return_code == 0), test_output=output)

    async def _stop(self, request: Request) -> None:
        sandbox = self._sandboxes.pop(request.session[SESSION_ID_KEY], None)
        if sandbox is not None:
            await sandbox.stop()


async def _write(sandbox: AsyncSandbox, files: dict[str, str]) -> None:
    """Write files by their paths in the repository. Raises `RuntimeError` if the sandbox cannot."""
    lines = ["set -e"]
    for path, content in files.items():
        quoted, coded = shlex.quote(path), base64.b64encode(content.encode()).decode()
        lines.append(f'mkdir -p "$(dirname {quoted})"; echo {coded} | base64 -d > {quoted}')
    done = await sandbox.exec("\n".join(lines))
    if done.return_code != 0:
        raise RuntimeError(f"cannot write {', '.join(files)}: {done.stderr or done.error_type}")


if __name__ == "__main__":
    FixRepo.run_webserver()
