"""Turns a Hugging Face folder into what OpenVINO GenAI reads: export_openvino.py MODEL OUT."""

import sys
from pathlib import Path

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer

model, out = sys.argv[1], Path(sys.argv[2])
OVModelForCausalLM.from_pretrained(model, export=True, compile=False).save_pretrained(out)
for converted, name in zip(
    convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True),
    ("openvino_tokenizer", "openvino_detokenizer"),
    strict=True,
):
    openvino.save_model(converted, out / f"{name}.xml")
