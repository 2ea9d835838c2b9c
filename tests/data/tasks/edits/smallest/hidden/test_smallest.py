import unittest

from smallest import smallest


class TestSmallest(unittest.TestCase):
    def test_smallest(self):
        self.assertEqual(smallest([4, 2, 9]), 2)
