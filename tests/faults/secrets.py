"""Keys that lie in the environment, and the search for them in everything that was written."""

from pathlib import Path

MARKER = "hunter2-must-stay-secret"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY")


def set_secrets(monkeypatch) -> None:
    """Each a value of its own that begins with the marker; W&B wants forty characters."""
    for name in VARIABLES:
        monkeypatch.setenv(name, f"{MARKER}-{name}".ljust(40, "x"))


def files_with(folder: Path, secret: str) -> list[Path]:
    """Files below a folder whose bytes or name hold the secret."""
    found = secret.encode()
    return [p for p in folder.rglob("*") if p.is_file() and (found in p.read_bytes() or secret in str(p))]
