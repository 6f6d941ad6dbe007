// TypeBox 0.34 on the realistic output: reads values by name from standard input, prints the rate of each.
import { readFileSync } from 'node:fs'
import { Type as T } from '@sinclair/typebox'
import { Value } from '@sinclair/typebox/value'

const values = JSON.parse(readFileSync(0, 'utf8'))
const literal = (value) => T.Literal(value)
const Item = T.Object({
  id: T.Integer(), name: T.String(), status: T.Union(['open', 'closed', 'archived'].map(literal)), score: T.Number(),
  created: T.String(), tags: T.Array(T.String()), active: T.Boolean({ default: true }),
  owner: T.Union([T.String(), T.Null()], { default: null }),
}, { additionalProperties: false })
const Out = T.Array(Item)
const rate = (value, ms) => {
  let n = 0, elapsed
  const work = () => Value.Check(Out, Value.Cast(Out, value))
  if (!work()) throw new Error('TypeBox rejects what it cast')
  const began = performance.now()
  do { for (let i = 0; i < 10; i++) work(); n += 10; elapsed = performance.now() - began } while (elapsed < ms)
  return n / elapsed * 1e3
}
const rates = {}
for (const [name, value] of Object.entries(values)) {
  rate(value, 300)
  rates[name] = rate(value, Number(process.argv[2] ?? 300))
}
console.log(JSON.stringify(rates))
