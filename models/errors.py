"""What can be wrong with a model directory.

ValueError
└── CheckpointError            the directory cannot be served
    ├── UnsupportedModelError  a well-formed checkpoint of a kind this server does not know
    └── MissingTensorError     the weights lack a tensor that the architecture needs
InvalidTextError (ValueError)  text that no tokenizer can take
"""


class CheckpointError(ValueError):
    """A model directory is missing something, or contradicts itself."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is of an architecture, or uses a feature, that is not supported."""


class MissingTensorError(CheckpointError):
    """The checkpoint's weights lack a tensor that its architecture needs."""


class InvalidTextError(ValueError):
    """Text or messages that cannot be turned into tokens: a client's mistake."""
