"""FP8 in the decode kernels: rounding to e4m3, and widening to operands of matrix products.

K and V are stored as x / scale, the scale a power of two of a channel. Kernels take the bytes as they are and
multiply queries and outputs by the scales instead. On Hopper a thread widens what it holds of an operand,
from shared memory into registers and without shuffles: which channel is which row or column of a product is
free, so every thread is given channels that lie side by side.

    K, a step of 16 channels of the product: thread j of four holds places 2j, 2j + 1, 2j + 8, 2j + 9,
    the next four bytes of its part of the chunk (`lane_of_place`)
    V, transposed: thread g of eight holds rows g and g + 8 of every 64, two bytes each of its part of the
    warp's channels (`channel_of_row`); bytes of two tokens are put side by side
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
import functools
from typing import Any

try:
    import tilelang.language as T  # noqa: N812
    from tilelang.layout import make_full_bank_swizzled_layout, make_half_bank_swizzled_layout
except ImportError as error:
    raise ImportError(f"the decode kernels need tilelang (pip install tilelang): {error}") from error

# Arrays of operands are in the order that TileLang gives registers of A in wgmma.
WIDEN_SOURCE = r"""
// Both halves of a word at once: a shift in place of the second name would be an instruction of its own.
__device__ __forceinline__ void leank_widen(unsigned bytes, unsigned &low, unsigned &high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

// keys: 64 tokens of a chunk a stage; wide: [chunk / 16][half of the places][half of the rows], by twos.
template <int kChunk>
__device__ __forceinline__ void leank_widen_keys(const void *keys, int stage, void *operand) {
  unsigned *wide = reinterpret_cast<unsigned *>(operand);
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const char *place =
        static_cast<const char *>(keys) + (stage * 64 + row + 8 * r) * kChunk + lane % 4 * (kChunk / 4);
    unsigned words[kChunk / 16];
    if (kChunk == 32) {
      *reinterpret_cast<uint2 *>(words) = *reinterpret_cast<const uint2 *>(place);
    } else {
      words[0] = *reinterpret_cast<const unsigned *>(place);
    }
#pragma unroll
    for (int s = 0; s < kChunk / 16; ++s) {
      leank_widen(words[s], wide[s * 4 + r], wide[s * 4 + 2 + r]);
    }
  }
}

// values: 64 tokens of 64 * kBlocks channels a stage, in panels of 128 or 64 bytes swizzled by TMA;
// wide: [token / 16][block of 64 rows][half of the tokens][half of the rows], two tokens each.
template <int kBlocks>
__device__ __forceinline__ void leank_widen_values(const void *values, int stage, void *operand) {
  constexpr int kPanel = kBlocks % 2 ? 64 : 128, kBytes = kBlocks % 2 ? 2 : 4;
  unsigned *wide = reinterpret_cast<unsigned *>(operand);
  int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 * kBlocks + lane / 4 * 2 * kBlocks;
#pragma unroll
  for (int b = 0; b < kBlocks; b += kBytes / 2) {
    int channel = first + 2 * b;
    const char *panel =
        static_cast<const char *>(values) + (stage * kBlocks * 64 + channel / kPanel * kPanel) * 64;
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      unsigned words[2];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        int token = 8 * s + lane % 4 * 2 + p;
        int line = channel % kPanel / 16 ^ (kPanel == 128 ? token % 8 : token / 2 % 4);
        const char *place = panel + token * kPanel + line * 16 + channel % 16;
        words[p] = kBytes == 4 ? *reinterpret_cast<const unsigned *>(place)
                               : *reinterpret_cast<const unsigned short *>(place);
      }
#pragma unroll
      for (int i = 0; i < kBytes / 2; ++i) {
        unsigned pairs = __byte_perm(words[0], words[1], i ? 0x7362 : 0x5140);
        unsigned *target = wide + s / 2 * 4 * kBlocks + (b + i) * 4 + s % 2 * 2;
        leank_widen(pairs, target[0], target[1]);
      }
    }
  }
}
"""


def lane_of_place(place: Any, chunk_size: int) -> Any:
    """Return the lane of a chunk that is place `place` of the products on Hopper."""
    return place % 8 // 2 * (chunk_size // 4) + place // 16 * 4 + place % 16 // 8 * 2 + place % 2


def channel_of_row(row: Any, value_size: int) -> Any:
    """Return the channel of V that is row `row` of the second product on Hopper."""
    blocks = value_size // 64
    return row % 64 // 16 * 16 * blocks + row % 8 * 2 * blocks + row // 64 * 2 + row % 16 // 8


def swizzle_values(values: Any) -> Any:
    """Return the layout in shared memory that `leank_widen_values` reads, without bank conflicts."""
    make = make_half_bank_swizzled_layout if values.shape[-1] % 128 else make_full_bank_swizzled_layout
    return make(values)


def to_fp8(number: Any) -> Any:
    """Return the byte of a float32, clamped and rounded to nearest even as torch does; NaN stays NaN."""
    bits = T.reinterpret(number, "uint32")
    magnitude = bits & T.uint32(0x7FFFFFFF)
    # Adding 2^14 leaves the multiples of 2^-9, the least e4m3, in the lowest bits.
    small = T.reinterpret(T.reinterpret(magnitude, "float32") + T.float32(2.0**14), "uint32") - T.uint32(
        0x46800000
    )
    rounded = magnitude + ((magnitude >> T.uint32(20)) & T.uint32(1)) + T.uint32(0x7FFFF)
    code = T.if_then_else(
        magnitude > T.uint32(0x7F800000),
        T.uint32(0x7F),
        T.if_then_else(
            magnitude >= T.uint32(0x43E00000),  # 448
            T.uint32(0x7E),
            T.if_then_else(
                magnitude < T.uint32(0x3C800000),  # 2^-6, the least normal e4m3
                small,
                (rounded - T.uint32(120 << 23)) >> T.uint32(20),
            ),
        ),
    )
    return T.cast(code | ((bits >> T.uint32(24)) & T.uint32(0x80)), "uint8")


def from_fp8(byte: Any, dtype: str) -> Any:
    """Return a byte as float16 or float32, both of which hold it exactly."""
    word, shift, nan, factor = (
        ("uint16", 7, 0x7E00, 2.0**8) if dtype == "float16" else ("uint32", 20, 0x7FC00000, 2.0**120)
    )
    number: Any = functools.partial(T.cast, dtype=word)
    code = number(byte)
    magnitude = code & number(0x7F)
    bits = T.if_then_else(magnitude == number(0x7F), number(nan), magnitude << number(shift))
    sign = (code & number(0x80)) << number(8 if dtype == "float16" else 24)
    return T.reinterpret(bits | sign, dtype) * T.cast(factor, dtype)
