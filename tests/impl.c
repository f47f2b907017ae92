/* The one file of the test build that holds the implementation; all test programs link with it. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
