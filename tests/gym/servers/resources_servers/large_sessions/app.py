"""NeMo Gym's own stateful counter, whose sessions can be given notes of any size: for tests and benchmarks of state."""

import random

from fastapi import FastAPI, Request
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, Field
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer

LINE_BYTES = 1000


class FillRequest(BaseModel):
    """`seed`: the same one gives the same notes."""

    kilobytes: int
    seed: int


class FillResponse(BaseModel):
    lines: int


class LargeSessionsServer(StatefulCounterResourcesServer):
    session_id_to_notes: dict[str, dict[str, object]] = Field(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/fill")(self.fill)
        return app

    async def fill(self, request: Request, body: FillRequest) -> FillResponse:
        chance = random.Random(body.seed)
        lines = [chance.randbytes(LINE_BYTES // 2).hex() for _ in range(body.kilobytes)]
        session_id = request.session[SESSION_ID_KEY]
        self.session_id_to_notes[session_id] = {"seed": body.seed, "lines": lines}
        return FillResponse(lines=len(lines))


if __name__ == "__main__":
    LargeSessionsServer.run_webserver()
