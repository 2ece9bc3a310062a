"""The files that ``offmarl new`` writes: working modules, copied under another name."""
