"""The task of a processor: key by key, rows before timers, whole answers, late rows, one commit, bounded memory."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql import types as T

from backends.exceptions import StoreClosedError
from backends.operator_schema import OperatorSchema
from coordinator_actor.messages import BatchTimes
from spark_bridge.event_time import EventTime
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.state_task import Logic
from spark_bridge.stateful.arrow_processor import (
    ArrowBatch,
    ArrowLogic,
    ArrowResult,
    ArrowStatefulProcessor,
    Declaring,
    arrow_processor,
)
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.process_task import InitialStateLogic, Mode, ProcessLogic
from spark_bridge.stateful.processor_state import ProcessorState
from spark_bridge.stateful.row_values import RowCodec
from spark_bridge.stateful.sorted_runs import Limits
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues

from .operator_runs import TS, OperatorRun, batch_of

KEYS = pa.schema([("user", pa.string())])
ROWS = pa.schema([("user", pa.string()), ("ts", TS), ("v", pa.int64())])
STRUCT = struct_of("user string, ts timestamp, v long")
OUTPUT = struct_of("user string, n long, total long")
USERS = ["ann", "bob", "eve", None, ""]
