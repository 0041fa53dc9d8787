"""The demo: real rollouts on real NeMo Gym servers, saved while they run, killed, and brought back.

Reading order:

grammar    PURE  what the policy may say next: text, then a tool call or the end
conversation PURE  what names a model call
network          a small recurrent network with random weights; torch is imported here alone
policy           the network behind an OpenAI chat endpoint, with a log of every generation
rows       PURE  the tasks that the trainer dispatches
engines          what the model server talks to: the policy, or a real vLLM
fleet            starts and kills the servers: the engine, NeMo Gym's, and what Safepoint puts beside them
hosts            the coordinator as an actor on a Ray of the demo's own
world            all that one run needs, killed and started again
drive            the trainer's side: dispatches rollouts, collects results, survives the crash
compare    PURE  what must be equal between two runs
evidence         what the snapshot's files and the policy's log say
figures    PURE  what was kept, lost and repeated
story            the demo itself

With a real vLLM (`make demo-vllm`):

tiny_model       a model with random weights
engine_log       loaded into vLLM: a log of every generation
engine_figures   PURE  what became of the tokens in flight at the cut
story_vllm       the demo with long generations in flight

Nothing here is needed by a user of Safepoint; everything here uses only what a user has.
"""
