//! Checks of the matrix product: values, and equal bits by both kernels and for any number of rows.

use super::data::{bf16_bytes, bf16_values, f32_bytes, f32_values, wide};
use super::{Limit, Run};
use crate::kernels::calls::{Output, Product};
use crate::kernels::compile::KernelError;
use crate::kernels::reference;
use crate::kernels::shapes::{PRODUCTS, ProductShape};

pub(super) fn check(run: &mut Run<'_, '_>) -> Result<(), KernelError> {
    // The first three are one shape with each kind of output: the gate runs every kernel.
    let shapes = match run.shapes(&PRODUCTS) {
        shapes if shapes.len() > 1 => shapes,
        _ => PRODUCTS[..3].to_vec(),
    };
    for shape in shapes {
        product(run, shape)?;
    }
    Ok(())
}

/// Bytes of the outputs before the product.
fn start(shape: ProductShape, residual: &[f32]) -> Vec<u8> {
    match shape.output {
        Output::AddF32 => f32_bytes(residual),
        Output::F32 => f32_bytes(&vec![f32::NAN; residual.len()]),
        Output::Bf16 => bf16_bytes(&vec![f32::NAN; residual.len()]),
    }
}

fn product(run: &mut Run<'_, '_>, shape: ProductShape) -> Result<(), KernelError> {
    let (rows, columns, depth) = (shape.rows as usize, shape.columns as usize, shape.depth as usize);
    let (x, w) = (run.random.bf16s(rows * depth), run.random.bf16s(columns * depth));
    let (bias, residual) = (run.random.normals(columns), run.random.normals(rows * columns));
    let (wide_x, wide_w) = (wide(&x), wide(&w));
    let want: Vec<f64> = (0..rows * columns)
        .map(|at| {
            let (row, column) = (at / columns, at % columns);
            let sum = reference::dot(&wide_x[row * depth..][..depth], &wide_w[column * depth..][..depth]);
            let bias = if shape.has_bias { f64::from(bias[column]) } else { 0.0 };
            let before = if shape.output == Output::AddF32 {
                f64::from(residual[at])
            } else {
                0.0
            };
            sum + bias + before
        })
        .collect();
    let (device_x, device_w) = (run.upload(&bf16_bytes(&x))?, run.upload(&bf16_bytes(&w))?);
    let device_bias = run.upload(&f32_bytes(&bias))?;
    let mut results = Vec::new();
    for few_rows in [false, true] {
        let out = run.upload(&start(shape, &residual))?;
        let call = Product {
            x: device_x.ptr(),
            w: device_w.ptr(),
            bias: shape.has_bias.then(|| device_bias.ptr()),
            out: out.ptr(),
            rows: shape.rows,
            columns: shape.columns,
            depth: shape.depth,
            output: shape.output,
        };
        let call = call.call_with(few_rows)?;
        let got = run.result(&call, &out)?;
        results.push((call.kernel, got));
    }
    let label = format!("{rows} x {columns} x {depth}");
    // Products of normal numbers have a variance of one, so a sum is about the root of the depth. A tensor core may truncate
    // where f32 rounds: with eight products at a time a bias of about 2.6e-9 of the sum for each step of the depth (computed).
    let relative = 1e-5 + 5e-9 * depth as f64;
    let sums = Limit {
        absolute: 2e-5 * (depth as f64).sqrt(),
        relative,
        nmse: relative * relative,
    };
    for (kernel, got) in &results {
        let of = (*kernel, label.clone());
        match shape.output {
            Output::Bf16 => run.compare(
                of,
                &bf16_values(got),
                &want,
                Limit {
                    absolute: sums.absolute,
                    ..Limit::BF16
                },
            ),
            Output::F32 | Output::AddF32 => run.compare(of, &f32_values(got), &want, sums),
        }
    }
    if let [(_, many), (kernel, few)] = &results[..] {
        run.same((*kernel, format!("{label}: bits of both tiles")), few, many);
    }
    Ok(())
}
