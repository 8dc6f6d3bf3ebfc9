# SPDX-License-Identifier: Apache-2.0
"""The words of ``transformers``, and what they are called here.

Who comes from there writes ``attention_mask`` and ``torch_dtype`` by habit. The functions that take
such options refuse them with our name for each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from shardax.extend import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

# By option of ``transformers``: what to write here. The page ``coming-from-transformers`` has them
# all in one table, and a test runs each.
OTHER_WORDS: dict[str, dict[str, str]] = {
    "generate": {
        "input_ids": "prompts; the argument behind the model",
        "inputs_embeds": "no option: prompts are tokens",
        "attention_mask": "mask; of the inputs of an EncoderDecoder input_mask",
        "decoder_input_ids": "prompts; input_ids are inputs",
        "max_length": "max_new_tokens; it does not count the prompt",
        "do_sample": "temperature; 0 takes the likeliest token, and 1.0, the default, draws",
        "eos_token_id": "stop",
        "pad_token_id": "no option: rows are returned without padding",
        "forced_bos_token_id": "model.generation_config.forced_start",
        "forced_eos_token_id": "model.generation_config.forced_end",
        "generation_config": "model.generation_config; set it to a sx.models.GenerationConfig",
        "num_beams": "no option: one text is followed for each prompt",
        "num_return_sequences": "prompts; give each as often as it is to be continued",
        "streamer": "stream=True",
        "use_cache": "no option: a model with make_cache has one",
        "generator": "seed",
    },
    "from_pretrained": {
        "torch_dtype": "dtype; it is the compute dtype, and param_dtype that of the parameters",
        "device_map": "mesh; rules say how it is split, and without a mesh all is on one device",
        "attn_implementation": "attention",
        "quantization_config": "no option: sx.quantize(model, 'int8') behind it; quantized files "
        "are read as they are, or as numbers with dequantize=True",
        "load_in_8bit": "no option: sx.quantize(model, 'int8') behind it",
        "load_in_4bit": "no option: sx.quantize(model, 'int4') behind it",
        "low_cpu_mem_usage": "no option: it always is",
        "revision": "no option: the name has it, 'org/name@revision'",
        "trust_remote_code": "no option: code of a model is never run; sx.models.register "
        "describes one",
        "subfolder": "no option: give the folder itself",
        "use_safetensors": "no option: nothing else is read",
        "ignore_mismatched_sizes": "no option: strict=False is for tensors that are missing",
    },
    "save_pretrained": {
        "safe_serialization": "no option: nothing else is written",
        "max_shard_size": "max_file_bytes; a number of bytes",
        "push_to_hub": "no option: huggingface_hub.upload_folder sends the folder",
        "state_dict": "no option: change the model",
    },
    "call": {
        "input_ids": "tokens; the first argument",
        "pixel_values": "the first argument; of a DualEncoder images, with channels last",
        "input_features": "inputs; the first argument, with frames before features",
        "attention_mask": "mask; of an EncoderDecoder input_mask",
        "decoder_input_ids": "tokens; the second argument of an EncoderDecoder",
        "decoder_attention_mask": "mask",
        "token_type_ids": "token_types",
        "position_ids": "positions",
        "past_key_values": "cache; model.make_cache(batch, length) makes one",
        "use_cache": "cache; model.make_cache(batch, length) makes one",
        "labels": "no option: sx.models.next_token_loss(model, batch) or sx.models.cross_entropy("
        "logits, targets)",
        "output_hidden_states": "no option: sx.surgery.record(model, ...) returns activations",
        "output_attentions": "no option: sx.surgery.record(model, ...) returns activations",
        "return_dict": "no option: a call returns the logits",
    },
}


def refuses_other_words(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator by which a function says what options of ``transformers`` are here.

    Args:
        name: That of a table of ``OTHER_WORDS``; ``"call"`` for the call of a model, whose errors
            begin with the name of its class.

    Returns:
        The decorator, of a function that takes no further options.
    """
    words = OTHER_WORDS[name]

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        options = list(inspect.signature(function).parameters)
        known = frozenset(options)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not known.issuperset(kwargs):
                owner = type(args[0]).__name__ if name == "call" else name
                raise unknown_options(owner, kwargs, options, words)
            return function(*args, **kwargs)

        return checked

    return decorated


def unknown_options(
    owner: str, given: Mapping[str, object], options: Sequence[str], words: Mapping[str, str]
) -> TypeError:
    """Returns the error of options that a function has not."""
    names = [option for option in options if option != "self"]
    told = [_told(name, names, words) for name in given if name not in names]
    return TypeError(f"{owner}: {'; '.join(told)}. Its arguments are {', '.join(names)}.")


def _told(name: str, names: Sequence[str], words: Mapping[str, str]) -> str:
    """Returns what is said of one option that a function has not."""
    word = words.get(name)
    if word is None:
        hint = did_you_mean(name, names).strip()
        return f"{name} is unknown" + (f" ({hint})" if hint else "")
    if word.startswith("no option"):
        return f"{name} is {word.replace('no option', 'no option here', 1)}"
    ours, _, note = word.partition("; ")
    return f"{name} is {ours} here" + (f" ({note})" if note else "")
