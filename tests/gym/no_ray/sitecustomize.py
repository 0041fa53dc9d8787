"""For servers without a gate: they do not start a Ray of their own."""

import importlib.util
import sys


class _NoRay:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "nemo_gym.server_utils":
            return None
        sys.meta_path.remove(_NoRay)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.initialize_ray = lambda: None

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _NoRay)
