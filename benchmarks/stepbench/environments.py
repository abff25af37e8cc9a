"""Throwaway environments for the peers: their own package from PyPI, torch and the rest from this one.

A peer's environment is a virtual environment without pip, with one `.pth` line that puts this
environment's site-packages behind its own. The peer itself comes from PyPI with `--no-deps`: SpecForge
pins another torch and all of sglang, none of which its training step imports. What a peer imports and this
environment lacks is listed beside it.
"""

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = Path("~/.cache/drafthead-bench").expanduser()


@dataclass(frozen=True)
class Contestant:
    """One trainer.

    Attributes:
        name: name of the contestant in `--contestants`.
        module: module that the contestant's process runs.
        requirements: packages that are installed for the contestant; none for ours, which runs in this environment.
        variants: ways of running on a CPU, the rows of the table.
        gpu_variants: ways of running on a GPU.
        parallel: way of training P-EAGLE, DFlash and DSpark; None: there is none, or not as a separate step.
    """

    name: str
    module: str
    requirements: tuple[str, ...]
    variants: tuple[str, ...]
    gpu_variants: tuple[str, ...]
    parallel: str | None = None

    def ways(self, drafter: str, device: str) -> tuple[str, ...]:
        """Its ways of training a drafter."""
        if drafter != "eagle3":
            return (self.parallel,) if self.parallel else ()
        return self.gpu_variants if device == "cuda" else self.variants


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("ours", "stepbench.ours", (), ("packed",), ("packed",), "packed"),
        # Beside itself: what train.precision is worth.
        Contestant("ours-trained", "stepbench.ours", (), ("bf16", "fp32"), ("bf16", "fp32")),
        Contestant(
            "specforge", "stepbench.specforge_step", ("specforge==0.2.0",), ("full", "compact"), ("full", "compact")
        ),
        Contestant(
            "speculators", "stepbench.speculators_step", ("speculators==0.9.0", "hs-connectors==0.9.0"),
            ("documents-trained", "packed-trained", "documents-frozen"), ("packed-trained", "packed-frozen"),
            "documents",
        ),
    )
}  # fmt: skip


def python_of(contestant: Contestant, root: Path) -> Path:
    """The interpreter that runs a contestant; makes its environment the first time.

    Raises:
        RuntimeError: PyPI could not be reached or has no such version; pip's words are in the message.
    """
    if not contestant.requirements:
        return Path(sys.executable)
    home = root / f"{'+'.join(contestant.requirements)}-py{sysconfig.get_python_version()}"
    python, done = home / "bin" / "python", home / "installed"
    if done.exists() and done.read_text() == _own_packages():
        return python
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "reuse.pth").write_text(_own_packages() + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    installed = subprocess.run([*pip, *contestant.requirements], capture_output=True, text=True, check=False)
    if installed.returncode:
        raise RuntimeError(f"installing {', '.join(contestant.requirements)} failed:\n{installed.stderr[-2000:]}")
    done.write_text(_own_packages())
    return python


def _own_packages() -> str:
    return sysconfig.get_paths()["purelib"]
