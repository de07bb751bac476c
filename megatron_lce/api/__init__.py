"""Operations that users call."""
