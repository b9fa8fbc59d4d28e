"""Where the library's operators are defined, for inductor to call as they are.

Not by `torch.library.custom_op`: its checks at each call take longer than all else that a launch
does on the host. Operators know no autograd and no autocast; nothing here needs either.
"""

import torch

LIBRARY = torch.library.Library("cbfn", "FRAGMENT")
