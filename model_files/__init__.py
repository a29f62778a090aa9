"""What a model's files say, read without torch: used by launcher, front, scheduler, detokenizer."""
