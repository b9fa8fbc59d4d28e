from tests.typecheck import checker as checker  # what the jaxtyping hook of the tests calls
