import unittest

from mail.name import user


class TestName(unittest.TestCase):
    def test_user(self):
        self.assertEqual(user("eva@post"), "eva")
