"""Converts models from and to other programs: fairseq-signals, ONNX, the Hugging Face Hub."""
