"""From files to pixels: sources, decoding, augmentation, built-in shapes."""
