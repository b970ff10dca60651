// The core without Python: what sanitizers see best. Built by `make cpp-tests`; doctest is the framework.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
