"""Folders of images: a folder for each split and class, or any tree of them."""
