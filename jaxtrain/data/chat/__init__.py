"""Conversations: messages, chat templates, which tokens are learned."""
