"""Conversations: rows, chat templates, the turns that are trained on, prompts."""
