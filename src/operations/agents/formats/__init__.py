"""Operations as the tools of model providers: one file for each form."""
