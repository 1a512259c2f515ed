"""Models to and from other programs: fairseq-signals, ONNX, the Hugging Face Hub."""
