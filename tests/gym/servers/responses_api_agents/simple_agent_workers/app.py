"""NeMo Gym's own simple agent, with the last two lines that an application needs in Gym to have several workers.

The application of the installed package lacks them: with `num_workers` above one its workers find no `app` and it ends.
"""

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_agents.simple_agent.app import SimpleAgent

if __name__ == "__main__":
    SimpleAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = SimpleAgent.run_webserver()
