"""Planning needs no torch: it must import, and plan, where there is none."""

import subprocess
import sys
from pathlib import Path

WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "transformers"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, NoTorch())
import pkgutil
import planner, strategies, planner.synthetic
for package in (planner, strategies):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        __import__(module.name)
from planner.solve import Problem, solve
print(solve(Problem(graph=planner.synthetic.chain(4), budget_bytes=600), strategies.make("mutwo")).status.value)
assert "torch" not in sys.modules
try:
    import torch
except ImportError:
    print("no torch")
"""


def test_planner_and_strategies_import_and_plan_where_there_is_no_torch():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["fits", "no torch"]
