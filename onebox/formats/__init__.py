"""Weight and KV formats: packing, unpacking, quantising and dequantising in plain torch.

Integer matrices of all file formats are unpacked to `GroupInt`; float formats are codes and scales; KV formats are
codecs. Independent of tensor names, files and kernels. Each module's docstring shows its byte layout.
"""

from onebox.formats.fp8 import (
    dequantize_fp8_block,
    dequantize_fp8_rows,
    dequantize_fp8_tensor,
    quantize_fp8_block,
    quantize_fp8_rows,
    quantize_fp8_tensor,
)
from onebox.formats.gptq import gptq_to_packed, pack_gptq, unpack_gptq
from onebox.formats.group_int import GroupInt, dequantize, quantize
from onebox.formats.int8 import (
    dequantize_int8_rows,
    group_int_to_int8_rows,
    int8_rows_to_group_int,
    quantize_int8_rows,
)
from onebox.formats.kv import KVCodec, KVCodecs, kv_codecs
from onebox.formats.kv_fp8 import decode_fp8, encode_fp8
from onebox.formats.kv_turboquant import (
    decode_turboquant,
    encode_turboquant,
    hadamard,
    rotate,
    sign_table,
    turboquant_levels,
    unrotate,
)
from onebox.formats.nvfp4 import (
    NVFP4,
    Dialect,
    dequantize_nvfp4,
    nvfp4_global_scale,
    pack_e2m1,
    quantize_nvfp4,
    unpack_e2m1,
)
from onebox.formats.packed_int import pack_quantized, unpack_quantized

__all__ = [
    "NVFP4",
    "Dialect",
    "GroupInt",
    "KVCodec",
    "KVCodecs",
    "decode_fp8",
    "decode_turboquant",
    "dequantize",
    "dequantize_fp8_block",
    "dequantize_fp8_rows",
    "dequantize_fp8_tensor",
    "dequantize_int8_rows",
    "dequantize_nvfp4",
    "encode_fp8",
    "encode_turboquant",
    "gptq_to_packed",
    "group_int_to_int8_rows",
    "hadamard",
    "int8_rows_to_group_int",
    "kv_codecs",
    "nvfp4_global_scale",
    "pack_e2m1",
    "pack_gptq",
    "pack_quantized",
    "quantize",
    "quantize_fp8_block",
    "quantize_fp8_rows",
    "quantize_fp8_tensor",
    "quantize_int8_rows",
    "quantize_nvfp4",
    "rotate",
    "sign_table",
    "turboquant_levels",
    "unpack_e2m1",
    "unpack_gptq",
    "unpack_quantized",
    "unrotate",
]
