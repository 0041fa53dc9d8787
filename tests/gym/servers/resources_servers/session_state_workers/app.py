"""NeMo Gym's own stateful counter, with the last two lines that an application needs in Gym to have several workers.

The application of the installed package lacks them: with `num_workers` above one its workers find no `app` and it ends.
"""

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer

if __name__ == "__main__":
    StatefulCounterResourcesServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = StatefulCounterResourcesServer.run_webserver()
