"""Stepwell: conversations that run in stages."""
