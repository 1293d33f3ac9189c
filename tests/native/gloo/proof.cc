// Prints in hexadecimal digits what hmac() makes of the key and the text that it is given.
#include "../../../csrc/gloo/proof.h"

#include <cstdio>

int main(int, char** arguments) {
  for (const unsigned char each : fl::hmac(arguments[1], arguments[2])) std::printf("%02x", each);
}
