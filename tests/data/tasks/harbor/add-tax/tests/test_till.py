import sys
import unittest

sys.path.insert(0, "/app")

from till import with_tax  # noqa: E402


class TestTill(unittest.TestCase):
    def test_tax(self):
        self.assertEqual(with_tax(100), 120)

    def test_nothing(self):
        self.assertEqual(with_tax(0), 0)
