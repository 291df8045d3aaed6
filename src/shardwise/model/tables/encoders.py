"""T5, BERT, the vision transformer and ResNet."""

from typing import Any


def _t5(hidden: int, layers: int, heads: int, head_dim: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "d_model": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "d_kv": head_dim,
        "d_ff": width,
        "vocab_size": 32128,
        **more,
    }


def _encoder(kind: str, hidden: int, layers: int, heads: int, **more: int) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        **more,
    }


def _vit(hidden: int, layers: int, heads: int, patch: int) -> dict[str, Any]:
    return _encoder("vit", hidden, layers, heads, patch_size=patch, image_size=224, num_labels=1000)


def _resnet(depths: list[int], kind: str = "bottleneck") -> dict[str, Any]:
    widths = [256, 512, 1024, 2048] if kind == "bottleneck" else [64, 128, 256, 512]
    return {"model_type": "resnet", "depths": depths, "hidden_sizes": widths, "layer_type": kind, "num_labels": 1000}


# Version 1.1 has a gate, and a head of its own.
_V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

TABLE: dict[str, dict[str, Any]] = {
    "t5-small": _t5(512, 6, 8, 64, 2048),
    "t5-base": _t5(768, 12, 12, 64, 3072),
    "t5-large": _t5(1024, 24, 16, 64, 4096),
    "t5-3b": _t5(1024, 24, 32, 128, 16384),
    "t5-11b": _t5(1024, 24, 128, 128, 65536),
    "t5-v1.1-small": _t5(512, 8, 6, 64, 1024, **_V1_1),
    "t5-v1.1-base": _t5(768, 12, 12, 64, 2048, **_V1_1),
    "t5-v1.1-large": _t5(1024, 24, 16, 64, 2816, **_V1_1),
    "t5-v1.1-xl": _t5(2048, 24, 32, 64, 5120, **_V1_1),
    "t5-v1.1-xxl": _t5(4096, 24, 64, 64, 10240, **_V1_1),
    "bert-base": _encoder("bert", 768, 12, 12, vocab_size=30522),
    "bert-large": _encoder("bert", 1024, 24, 16, vocab_size=30522),
    "vit-base-16": _vit(768, 12, 12, 16),
    "vit-large-16": _vit(1024, 24, 16, 16),
    "vit-huge-14": _vit(1280, 32, 16, 14),
    "resnet-18": _resnet([2, 2, 2, 2], "basic"),
    "resnet-34": _resnet([3, 4, 6, 3], "basic"),
    "resnet-50": _resnet([3, 4, 6, 3]),
    "resnet-101": _resnet([3, 4, 23, 3]),
    "resnet-152": _resnet([3, 8, 36, 3]),
}

ALIASES = {
    "bert-base-uncased": "bert-base",
    "bert-large-uncased": "bert-large",
    "flan-t5-xl": "t5-v1.1-xl",
    "flan-t5-xxl": "t5-v1.1-xxl",
    "vit-base-patch16-224": "vit-base-16",
    "vit-large-patch16-224": "vit-large-16",
}
