// Prints hmac(key, text) of its arguments in hexadecimal digits.
#include "../../../csrc/gloo/proof.h"

#include <cstdio>

int main(int, char** arguments) {
  for (const unsigned char each : fl::hmac(arguments[1], arguments[2])) std::printf("%02x", each);
}
