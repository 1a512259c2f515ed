"""Make synthetic ECGs, in archives that are laid out like real ones."""
