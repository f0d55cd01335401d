"""What a job is trained on: sources of samples, their order, and the way to the device.

`open_data` is the door; `order.py` says which rank sees which sample when; `loading.py` brings them.
"""

from train.data.loading import Batches, Micro, evaluation_batches
from train.data.order import Order
from train.data.sources import Data, Samples, Spec, open_data

__all__ = ["Batches", "Data", "Micro", "Order", "Samples", "Spec", "evaluation_batches", "open_data"]
