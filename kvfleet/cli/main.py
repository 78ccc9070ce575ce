"""The `kvfleet` command: its subcommands."""

from __future__ import annotations

import typer

from kvfleet.cli import bench, demo, doctor, down, drain, explain, inspect, record, simulate, size, status, up

__all__ = ["app"]

app = typer.Typer(
    help="One KV cache for a fleet of inference nodes, on Ray.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(up.up)
app.command()(down.down)
app.command()(status.status)
app.command()(explain.explain)
app.command()(drain.drain)
app.command()(record.record)
app.command()(inspect.inspect)
app.command()(doctor.doctor)
app.command()(simulate.simulate)
app.command()(size.size)
app.command("demo")(demo.run)
app.add_typer(bench.app, name="bench")
