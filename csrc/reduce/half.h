// float16 and bfloat16 as bits, and their conversions: branch-free, so that loops vectorise.
#pragma once

#include <cstdint>
#include <cstring>

namespace fl {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Float16 {
  uint16_t bits;

  float widen() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    // Multiplying by 2^112 corrects the exponent's bias and normalises subnormals in one step.
    const float scaled = float_of(magnitude) * float_of(0x77800000u);
    const uint32_t finite = bits_of(scaled);
    const uint32_t special = magnitude | 0x7f800000u;  // infinity and NaN keep their mantissa
    return float_of(sign | ((bits & 0x7c00u) == 0x7c00u ? special : finite));
  }

  // Convert `value`; round to nearest, ties to even.
  static Float16 narrow(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // In the normal range: correct the exponent's bias and round in integer arithmetic.
    const uint32_t odd = (magnitude >> 13) & 1u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
    // In the subnormal range: adding 0.5 makes the FPU shift and round the mantissa.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    // As with the processor's instruction, a NaN keeps the upper bits of its mantissa.
    const uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    const uint32_t nan_or_inf = magnitude > 0x7f800000u ? quiet_nan : 0x7c00u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t result = magnitude >= 0x477ff000u ? nan_or_inf : finite;
    return {static_cast<uint16_t>(sign | result)};
  }
};

struct Bfloat16 {
  uint16_t bits;

  float widen() const { return float_of(static_cast<uint32_t>(bits) << 16); }

  static Bfloat16 narrow(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<uint16_t>(is_nan ? quiet_nan : rounded)};
  }
};

}  // namespace fl
