#include "proof.h"

#include <array>
#include <cstdint>
#include <cstring>

namespace fl {
namespace {

// SHA-256 (FIPS 180-4).
constexpr size_t kBlock = 64;
using Words = std::array<uint32_t, 8>;

constexpr Words kFirst = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turned(uint32_t x, int by) { return x >> by | x << (32 - by); }

uint32_t word_at(const char* bytes) {
  const auto* at = reinterpret_cast<const unsigned char*>(bytes);
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
}

void mix(Words& state, const char* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = word_at(block + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t first_mix = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3;
    const uint32_t second_mix = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + first_mix + w[i - 7] + second_mix;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < 64; ++i) {
    const uint32_t first_sum = turned(e, 6) ^ turned(e, 11) ^ turned(e, 25);
    const uint32_t first = h + first_sum + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    const uint32_t second_sum = turned(a, 2) ^ turned(a, 13) ^ turned(a, 22);
    const uint32_t second = second_sum + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const Words mixed = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += mixed[i];
}

std::string in_bytes(uint64_t number, int count) {
  std::string bytes;
  for (int i = count - 1; i >= 0; --i) bytes += static_cast<char>(number >> (8 * i));
  return bytes;
}

std::string sha256(std::string text) {
  const uint64_t bits = 8 * text.size();
  text += '\x80';
  while (text.size() % kBlock != kBlock - 8) text += '\0';
  text += in_bytes(bits, 8);
  Words state = kFirst;
  for (size_t at = 0; at < text.size(); at += kBlock) mix(state, &text[at]);
  std::string digest;
  for (uint32_t word : state) digest += in_bytes(word, 4);
  return digest;
}

}  // namespace

std::string hmac(const std::string& key, const std::string& text) {
  std::string inner(kBlock, '\x36'), outer(kBlock, '\x5c');
  for (size_t i = 0; i < key.size(); ++i) inner[i] ^= key[i], outer[i] ^= key[i];
  return sha256(outer + sha256(inner + text));
}

std::string Prover::of(int source, int destination) const {
  return hmac(key_, "flashlight_py" + in_bytes(source, 4) + in_bytes(destination, 4));
}

bool Prover::is_shown_by(int peer, const char* shown) const {
  const std::string proof = of(peer, rank_);
  int difference = 0;
  for (size_t i = 0; i < FL_PROOF_BYTES; ++i) difference |= shown[i] ^ proof[i];
  return difference == 0;
}

}  // namespace fl
