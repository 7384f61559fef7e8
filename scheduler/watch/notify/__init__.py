"""Messages about incidents, to people and programs: by HTTP, by e-mail, by a command.

Other packages import: `channels`, `delivery`, `notifier`.
"""
