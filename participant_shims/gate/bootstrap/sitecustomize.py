"""Found by Python at start when this folder is on PYTHONPATH: loads the gate into a NeMo Gym server.

The rule kept here: it harms nobody. It acts only where NEMO_GYM_CONFIG_PATH says that a Gym server starts; any other
sitecustomize still runs; a failure is printed once and the process goes on without a gate.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_gate() -> None:
    if not os.environ.get("NEMO_GYM_CONFIG_PATH"):
        return
    try:
        if importlib.util.find_spec("participant_shims") is None:
            # The server's environment does not have Safepoint installed: take it from beside this file, last on the
            # path so that nothing of the server's is shadowed.
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
        from participant_shims.gate.install import install

        install()
    except Exception as error:
        print(f"safepoint: the gate is not loaded: {type(error).__name__}: {error}", file=sys.stderr)


def _load_next() -> None:
    others = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_load_gate()
_load_next()
