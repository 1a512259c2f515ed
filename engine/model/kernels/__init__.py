"""Fast replacements for plain operations of the encoder."""
