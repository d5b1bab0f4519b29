"""Small modules with one purpose each; upstream's names where upstream has them."""
