"""Fine-tuning of a run's encoder: python -m jobs.finetune run=<id, name or folder> labels_share=0.1."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("finetune")
