"""Attention over paged keys and values, behind engine.protocols.AttentionBackend."""
