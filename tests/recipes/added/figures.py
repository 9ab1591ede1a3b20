from ssl_sec.figures.runs import training_figures as draw

__all__ = ["draw"]
