"""What is measured besides the verdict, one file for each measurement.

To add a measurement: give `quality.sections` a model and `CheckResult` a field of it, write a module with
`async def measure(context: MeasurementContext) -> ThatModel`, and enter the field's name in `measure.MEASUREMENTS` and in
`quality.model.SectionName`. Raise `Unmeasured` for what cannot be measured here. What a reader should notice goes
into `findings`.
"""
