"""From a checkpoint on disk to a `LlamaModel`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import attrs
import torch
from torch import Tensor

from pdcore.errors import ConfigError, MissingExtra, MissingWeights, PdcoreError, UnsupportedModel
from pdcore.runner.models.config import ModelConfig, config_from_hf
from pdcore.runner.models.linear import make_linear
from pdcore.runner.models.llama import DecoderLayer, LlamaModel
from pdcore.runner.models.norm import RMSNorm
from pdcore.runner.models.rope import interleave_halves, inverse_frequencies
from pdcore.runner.models.weights import SafetensorsSource, WeightSource

__all__ = ["load_model"]

_NUM_DIGEST_ROWS = 8


def load_model(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaModel:
    """Load a Hugging Face folder with safetensors, or a GGUF file.

    Args:
        path: the folder or file.
        device: where the weights go.
        dtype: what floating-point type they are converted to.

    Raises:
        UnsupportedModel: the architecture, a feature of it or the file's format is not known, or a
            GGUF file holds tensors or metadata that would not be computed.
        MissingWeights: a file or tensor is absent, truncated or damaged.
        ConfigError: the config is malformed.
    """
    path = Path(path)
    try:
        config, source = _open_checkpoint(path)
        try:
            model = _Assembler(config, source, torch.device(device), dtype).assemble()
            _refuse_unread(source)
            return model
        finally:
            source.close()
    except (PdcoreError, MemoryError):
        raise
    except Exception as error:
        # Whatever else a damaged or foreign file makes the readers stumble over.
        raise UnsupportedModel(
            f"{path} cannot be read as a model: its config or weights hold what no supported model "
            f"has ({type(error).__name__}: {error}). Is the file damaged?"
        ) from error


def _open_checkpoint(path: Path) -> tuple[ModelConfig, WeightSource]:
    if path.is_dir():
        return config_from_hf(_read_config(path / "config.json")), SafetensorsSource(path)
    if not path.exists():
        raise MissingWeights(f"{path} does not exist: give a Hugging Face folder or a GGUF file")
    if path.suffix != ".gguf":
        raise UnsupportedModel(
            f"{path} is neither a folder nor a .gguf file: give a Hugging Face folder with "
            "config.json and safetensors, or a GGUF file"
        )
    try:
        from pdcore.runner.models.gguf import GGUFSource  # only those who have such a file need it
    except ModuleNotFoundError as error:
        raise MissingExtra(f"reading {path.name}", "torch", error.name or "gguf") from error
    source = GGUFSource(path)
    return source.config, source


def _refuse_unread(source: WeightSource) -> None:
    unread = source.unread()
    if unread:
        raise UnsupportedModel(
            f"{source.path} has {len(unread)} tensors that would not be computed, among them "
            f"{', '.join(unread[:3])}: it is a variant of the architecture that is not supported"
        )


def _read_config(path: Path) -> dict[str, object]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise MissingWeights(f"{path.parent} has no config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not an object")
    return raw


@attrs.frozen
class _Assembler:
    config: ModelConfig
    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    digest: hashlib._Hash = attrs.field(init=False)

    @digest.default
    def _start_digest(self) -> hashlib._Hash:
        return hashlib.sha256(repr(attrs.astuple(self.config)).encode())

    def assemble(self) -> LlamaModel:
        config = self.config
        vocabulary = (config.vocab_size, config.hidden_size)
        embed_tokens = self._tensor("model.embed_tokens.weight", vocabulary)
        self._digest(embed_tokens)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        # Raises when they are not finite; here, where the shapes are known to be those of the file.
        inverse_frequencies(config.rope, config.head_dim)
        return LlamaModel(
            config=config,
            embed_tokens=embed_tokens,
            layers=layers,
            final_norm=self._norm("model.norm.weight"),
            lm_head=make_linear(self._lm_head(embed_tokens)),
            fingerprint=self.digest.hexdigest()[:32],
        )

    def _lm_head(self, embed_tokens: Tensor) -> Tensor:
        name = "lm_head.weight"
        tied = self.config.tie_word_embeddings
        if tied and name not in self.source:
            return embed_tokens
        lm_head = self._tensor(name, tuple(embed_tokens.shape))
        if not tied:
            return lm_head
        if not torch.equal(lm_head, embed_tokens):
            # transformers 4 passes over the tensor, transformers 5 computes with it.
            raise UnsupportedModel(
                f"{self.source.path} ties its word embeddings but has another {name!r}: set "
                "tie_word_embeddings to false to use that tensor, or remove it"
            )
        return embed_tokens

    def _layer(self, index: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        query_size = config.num_heads * config.head_dim
        output_bias = prefix + "self_attn.o_proj.bias"
        attention_norm = self._norm(prefix + "input_layernorm.weight")
        qkv = self._qkv(prefix, "weight", (hidden,))
        gate_up = [
            self._tensor(f"{prefix}mlp.{name}_proj.weight", (inner, hidden))
            for name in ("gate", "up")
        ]
        down = self._tensor(prefix + "mlp.down_proj.weight", (hidden, inner))
        if index == 0:
            self._digest(qkv)
        if index == config.num_layers - 1:
            self._digest(down)
        return DecoderLayer(
            attention_norm=attention_norm,
            qkv=make_linear(qkv, self._qkv(prefix, "bias", ()) if config.qkv_bias else None),
            qk_norm=self._qk_norm(prefix) if config.qk_norm else None,
            output=make_linear(
                self._tensor(prefix + "self_attn.o_proj.weight", (hidden, query_size)),
                self._tensor(output_bias, (hidden,)) if config.output_bias else None,
            ),
            feed_forward_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            gate_up=make_linear(torch.cat(gate_up)),
            down=make_linear(down),
        )

    def _norm(self, name: str) -> RMSNorm:
        weight = self._tensor(name, (self.config.hidden_size,))
        return RMSNorm(weight, self.config.rms_norm_eps)

    def _qkv(self, prefix: str, kind: str, trailing: tuple[int, ...]) -> Tensor:
        config = self.config
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        parts = []
        for name, count in heads.items():
            part = self._tensor(
                f"{prefix}self_attn.{name}_proj.{kind}", (count * config.head_dim, *trailing)
            )
            parts.append(part if name == "v" else interleave_halves(part, count))
        return torch.cat(parts)

    def _qk_norm(self, prefix: str) -> Tensor:
        config = self.config
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        parts = []
        for name, count in heads.items():
            weight = self._tensor(f"{prefix}self_attn.{name}_norm.weight", (config.head_dim,))
            parts.append(interleave_halves(weight, 1).unsqueeze(0).expand(count, -1))
        return torch.cat(parts)

    def _digest(self, tensor: Tensor) -> None:
        """Take in a few rows of a weight, before it is packed: cheap, and enough to differ."""
        step = max(1, tensor.shape[0] // _NUM_DIGEST_ROWS)
        self.digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        self.digest.update(tensor[::step].float().cpu().numpy().tobytes())

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.source.read(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"{self.source.path}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"but the config calls for {shape}"
            )
        if not tensor.is_floating_point():
            raise UnsupportedModel(
                f"{self.source.path}: tensor {name!r} is of {tensor.dtype}, and only weights of a "
                "floating-point type are supported; give a quantized model as a GGUF file"
            )
        return tensor.to(device=self.device, dtype=self.dtype)
