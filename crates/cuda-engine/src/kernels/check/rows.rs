//! Checks of the kernels that work row by row.

use super::data::{bf16_bytes, bf16_values, f32_bytes, f32_values, u32_bytes, wide};
use super::{Limit, Run};
use crate::kernels::calls::{AddRmsNorm, CapLogits, Embed, Gate, GateFunction, GatherRows, RmsNorm};
use crate::kernels::compile::KernelError;
use crate::kernels::reference;
use crate::kernels::shapes::ROWS;
use crate::kernels::table::KernelId;

const EPSILON: f32 = 1e-5;
const VOCAB: u32 = 50;

pub(super) fn check(run: &mut Run<'_, '_>) -> Result<(), KernelError> {
    for (rows, columns) in run.shapes(&ROWS) {
        embed(run, rows, columns)?;
        norm(run, rows, columns)?;
        for has_weight in [false, true] {
            add_norm(run, (rows, columns), has_weight)?;
        }
        for function in [GateFunction::Silu, GateFunction::GeluTanh] {
            gate(run, (rows, columns), function)?;
        }
        gather(run, rows, columns)?;
        cap(run, rows, columns)?;
    }
    Ok(())
}

fn size(rows: u32, columns: u32) -> usize {
    rows as usize * columns as usize
}

fn label(rows: u32, columns: u32) -> String {
    format!("{rows} x {columns}")
}

fn embed(run: &mut Run<'_, '_>, rows: u32, columns: u32) -> Result<(), KernelError> {
    let table = run.random.bf16s(size(VOCAB, columns));
    let tokens: Vec<u32> = (0..rows).map(|_| run.random.below(VOCAB)).collect();
    // A product with 1.5 is exact in f32.
    let rows_of_table = tokens
        .iter()
        .map(|token| &table[size(*token, columns)..][..columns as usize]);
    let want: Vec<f64> = rows_of_table.flatten().map(|value| f64::from(*value) * 1.5).collect();
    let (device_tokens, device_table) = (run.upload(&u32_bytes(&tokens))?, run.upload(&bf16_bytes(&table))?);
    let out = run.upload(&f32_bytes(&vec![f32::NAN; want.len()]))?;
    let call = Embed {
        tokens: device_tokens.ptr(),
        table: device_table.ptr(),
        out: out.ptr(),
        rows,
        columns,
        scale: 1.5,
    };
    let got = run.result(&call.call()?, &out)?;
    run.compare(
        (KernelId::Embed, label(rows, columns)),
        &f32_values(&got),
        &want,
        Limit::EXACT,
    );
    Ok(())
}

fn norm(run: &mut Run<'_, '_>, rows: u32, columns: u32) -> Result<(), KernelError> {
    let (x, weight) = (
        run.random.normals(size(rows, columns)),
        run.random.normals(columns as usize),
    );
    let (wide_x, wide_weight) = (wide(&x), wide(&weight));
    let normed = wide_x.chunks_exact(columns as usize);
    let want: Vec<f64> = normed
        .flat_map(|row| reference::rms_norm(row, &wide_weight, EPSILON.into()))
        .collect();
    let (x, weight) = (run.upload(&f32_bytes(&x))?, run.upload(&f32_bytes(&weight))?);
    let out = run.upload(&bf16_bytes(&vec![f32::NAN; want.len()]))?;
    let call = RmsNorm {
        x: x.ptr(),
        weight: weight.ptr(),
        out: out.ptr(),
        rows,
        columns,
        epsilon: EPSILON,
    };
    let got = run.result(&call.call()?, &out)?;
    run.compare(
        (KernelId::RmsNorm, label(rows, columns)),
        &bf16_values(&got),
        &want,
        Limit::BF16,
    );
    Ok(())
}

fn add_norm(run: &mut Run<'_, '_>, (rows, columns): (u32, u32), has_weight: bool) -> Result<(), KernelError> {
    let count = size(rows, columns);
    let (stream, branch) = (run.random.normals(count), run.random.normals(count));
    let weights: [Vec<f32>; 2] = [
        run.random.normals(columns as usize),
        run.random.normals(columns as usize),
    ];
    let [weight, branch_weight] = [wide(&weights[0]), wide(&weights[1])];
    let (mut want_stream, mut want) = (Vec::new(), Vec::new());
    let (wide_stream, wide_branch) = (wide(&stream), wide(&branch));
    let per_row = wide_stream
        .chunks_exact(columns as usize)
        .zip(wide_branch.chunks_exact(columns as usize));
    for (stream, branch) in per_row {
        let added = match has_weight {
            true => reference::rms_norm(branch, &branch_weight, EPSILON.into()),
            false => branch.to_vec(),
        };
        let sum: Vec<f64> = stream.iter().zip(&added).map(|(a, b)| a + b).collect();
        want.extend(reference::rms_norm(&sum, &weight, EPSILON.into()));
        want_stream.extend(sum);
    }
    let (stream, branch) = (run.upload(&f32_bytes(&stream))?, run.upload(&f32_bytes(&branch))?);
    let (weight, branch_weight) = (
        run.upload(&f32_bytes(&weights[0]))?,
        run.upload(&f32_bytes(&weights[1]))?,
    );
    let out = run.upload(&bf16_bytes(&vec![f32::NAN; count]))?;
    let call = AddRmsNorm {
        stream: stream.ptr(),
        branch: branch.ptr(),
        branch_weight: has_weight.then(|| branch_weight.ptr()),
        weight: weight.ptr(),
        out: out.ptr(),
        rows,
        columns,
        epsilon: EPSILON,
    };
    let got = run.result(&call.call()?, &out)?;
    let got_stream = run.bench.download(&stream)?;
    let named = |what: &str| {
        let normed = if has_weight { ", branch normed" } else { "" };
        (
            KernelId::AddRmsNorm,
            format!("{}{normed}: {what}", label(rows, columns)),
        )
    };
    run.compare(named("stream"), &f32_values(&got_stream), &want_stream, Limit::F32);
    run.compare(named("out"), &bf16_values(&got), &want, Limit::BF16);
    Ok(())
}

fn gate(run: &mut Run<'_, '_>, (rows, columns): (u32, u32), function: GateFunction) -> Result<(), KernelError> {
    let mut gate_up = run.random.bf16s(2 * size(rows, columns));
    // Where powers overflow and vanish.
    (gate_up[0], gate_up[1]) = (200.0, -200.0);
    let rows_of_both = gate_up.chunks_exact(2 * columns as usize);
    let want: Vec<f64> = rows_of_both
        .flat_map(|row| {
            let (gates, ups) = row.split_at(columns as usize);
            gates
                .iter()
                .zip(ups)
                .map(move |(g, u)| reference::gate(function, f64::from(*g), f64::from(*u)))
        })
        .collect();
    let from = run.upload(&bf16_bytes(&gate_up))?;
    let out = run.upload(&bf16_bytes(&vec![f32::NAN; want.len()]))?;
    let call = Gate {
        function,
        gate_up: from.ptr(),
        out: out.ptr(),
        rows,
        columns,
    };
    let call = call.call()?;
    let got = run.result(&call, &out)?;
    run.compare(
        (call.kernel, label(rows, columns)),
        &bf16_values(&got),
        &want,
        Limit::BF16,
    );
    Ok(())
}

fn gather(run: &mut Run<'_, '_>, rows: u32, columns: u32) -> Result<(), KernelError> {
    let x = run.random.normals(size(rows, columns));
    let wanted: Vec<u32> = (0..rows).rev().chain([0]).collect();
    let rows_of_x = wanted.iter().map(|row| &x[size(*row, columns)..][..columns as usize]);
    let want: Vec<f32> = rows_of_x.flatten().copied().collect();
    let (from, indexes) = (run.upload(&f32_bytes(&x))?, run.upload(&u32_bytes(&wanted))?);
    let out = run.upload(&f32_bytes(&vec![f32::NAN; want.len()]))?;
    let call = GatherRows {
        x: from.ptr(),
        rows: indexes.ptr(),
        out: out.ptr(),
        count: wanted.len() as u32,
        columns,
    };
    let got = run.result(&call.call()?, &out)?;
    run.same((KernelId::GatherRows, label(rows, columns)), &got, &f32_bytes(&want));
    Ok(())
}

fn cap(run: &mut Run<'_, '_>, rows: u32, columns: u32) -> Result<(), KernelError> {
    let mut logits: Vec<f32> = run
        .random
        .normals(size(rows, columns))
        .iter()
        .map(|logit| logit * 20.0)
        .collect();
    (logits[0], logits[1]) = (1e4, -1e4);
    let want: Vec<f64> = logits
        .iter()
        .map(|logit| reference::capped((*logit).into(), 30.0))
        .collect();
    let memory = run.upload(&f32_bytes(&logits))?;
    let call = CapLogits {
        logits: memory.ptr(),
        count: logits.len() as u64,
        cap: 30.0,
    };
    let got = run.result(&call.call()?, &memory)?;
    // tanh is 1 less a quotient: near zero the error is one of 1.
    let limit = Limit {
        absolute: 30.0 * 1e-6,
        ..Limit::F32
    };
    run.compare(
        (KernelId::CapLogits, label(rows, columns)),
        &f32_values(&got),
        &want,
        limit,
    );
    Ok(())
}
